"""`tercet launch_server`: `tercet serve` with the options of SGLang's command of that name."""

"""Chat requests of every API: templates, tools, grammars, and parsed answers."""

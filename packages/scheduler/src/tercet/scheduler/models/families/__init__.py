"""Model families, one file each: their modules and how they differ."""

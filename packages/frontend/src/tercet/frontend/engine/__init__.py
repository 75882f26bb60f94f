"""`Engine`: a whole server in one Python object, without HTTP."""

"""What `tools/gpu_check.py` finds out, a stage a function. Each yields parts of its results as it has them."""

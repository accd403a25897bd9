"""LLM inference on TPU slices with Ray Serve and vLLM."""

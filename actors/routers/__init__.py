"""What routers in front of several replicas are told, as vLLM tells it."""

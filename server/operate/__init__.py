"""For who runs a server: health, metrics, the inspector's endpoints, events, recordings, the OpenAPI document."""

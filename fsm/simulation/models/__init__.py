"""The world of the router: several models, scripted engines and clients, and what must hold at each moment."""

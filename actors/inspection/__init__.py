"""What an engine tells of itself: requests, actors, steps, incidents, events, and recordings."""

"""The page that a browser is given at `/`: a chat, and at `/inspector` what shows the machines."""

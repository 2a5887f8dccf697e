"""The machines' second driver: no loop, no clock, no device; chance and faults come from one seed.

`world` holds the machines, the links between them and the clients, `checks` what must hold; `device` is a device that computes the next token
from what its KV blocks really hold; `swarm` runs seeds with a drawn mix of faults; `explore` tries every order of
events in a small world.
"""

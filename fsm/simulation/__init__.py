"""The machines' second driver: no loop, no clock, no device; chance and faults come from one seed.

`world` holds the machines, the links between them and the clients; `checks` what must hold; `device` computes the
next token from what its KV blocks really hold, and `oracle` says what it should have been; `swarm` runs seeds with a
drawn mix of faults; `explore` tries every order of events in small worlds; `mutants` are bugs planted on purpose, that
both must find.
"""

"""The world: machines, links, a device, clients and time, and what may go wrong in it."""

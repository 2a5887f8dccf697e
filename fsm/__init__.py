"""Every decision NovaInfer takes: state machines, scheduling, KV accounting, text assembly. Pure and synchronous.

Nothing here reads a clock, draws a number, waits, or touches a device. Time and chance arrive as events, and what
should happen in the world leaves as effects; so the same machines run under asyncio (`novainfer.actors`), under a
seeded simulator and under an exhaustive explorer (`novainfer.fsm.simulation`).
"""

"""Where the machines of `novainfer.fsm` meet asyncio, threads and devices. Thin: nothing is decided here."""

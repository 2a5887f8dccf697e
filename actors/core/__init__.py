"""The asyncio shells of the machines: mailboxes, streams, threads and the watchdog."""

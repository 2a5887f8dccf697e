"""The device behind its link: in a thread of the engine's process or in a process of its own."""

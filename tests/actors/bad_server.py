"""A program in place of the device server that does not speak the language: `NOVA_BAD_SERVER` says how."""

from __future__ import annotations

import os
import socket
import sys
import threading

from novainfer.actors.device.wire import Beat, FrameWriter
from novainfer.fsm.messages.events import JobDone, JobFailed
from novainfer.fsm.messages.step import StepDone

sock = socket.socket(fileno=int(sys.argv[1]))
how = os.environ["NOVA_BAD_SERVER"]
beat = FrameWriter().frame(-1, Beat())
if how == "garbage":
    sock.sendall(beat + b"\xff" * 64)
elif how == "half a frame":
    sock.sendall(beat[:-1])
    os._exit(0)
elif how == "twice":
    sock.sendall(beat * 2)
elif how == "closes":
    sock.close()
elif how == "unasked":
    frames = FrameWriter()
    for message in (Beat(), JobDone("Load", {}, 0), JobFailed("Fit", "why?", 0), StepDone(1, 0, [65]), Beat()):
        sock.sendall(frames.frame(0, message))
elif how == "deaf":
    pass
threading.Event().wait()

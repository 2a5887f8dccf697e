"""The client's side of the machines: the gate that lets streams in, and the stream that its reader reads."""

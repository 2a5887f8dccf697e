"""The benchmarks: `novainfer bench`."""

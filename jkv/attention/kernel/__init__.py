"""The kernels for GPUs, written in Pallas: forward, derivative, and stores of rows.

`interface` has the backends. A call gets the tiles of its GPU (`tiles.table`), a list
of work (`work`) and a launch (`launches`) of a body (`bodies`). Start with
`bodies.attention`; `triton` lowers the same bodies without Pallas.
"""

"""One forward pass on the devices of a mesh, with the bits of a single device.

    mesh.py      Parallel: the mesh as an argument, and which rows a device has
    specs.py     what a device stores and reads of every weight
    columns.py   layers by columns over the axis `tensor`, within shard_map
    experts.py   tokens travel to their experts over the axis `expert`

Over `data`, `fsdp` and `expert` a device has rows of the batch, over `tensor` columns of every
matrix. No contraction is ever cut.
"""

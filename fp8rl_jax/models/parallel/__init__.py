"""One forward pass on the devices of a mesh, with the bits of a single device.

::

    batch --(data, fsdp, expert)--> a device's rows --+
                                                      +--> its part of each product, no sum between
    weights --(tensor)--> a device's columns ---------+    devices --> all-gather of the parts
    experts --(expert)--> a device's experts               rows are sent to their experts and back

    mesh.py      `Parallel`: the mesh as an argument, and the rows of each device (read first)
    specs.py     shardings of every weight, as stored and as read
    columns.py   layers split by columns over the axis `tensor`, inside a shard_map
    experts.py   rows sent to the devices of their experts, over the axis `expert`

Not done: row-parallel layers, pipelines, sequences split over devices. Row-parallel layers would
split a contraction and add its parts in an order that follows from the mesh.
"""

"""A ``.metadata`` of a gigabyte and more, read in seconds by several processes.

``reading`` gives the result, ``readers`` starts who reads. Nothing here but ``reading`` needs torch.
"""

"""Fast reading of a ``.metadata`` of a gigabyte and more, in seconds, by several processes.

``reading`` returns the result, and ``readers`` starts the readers. Only ``reading`` needs torch.
"""

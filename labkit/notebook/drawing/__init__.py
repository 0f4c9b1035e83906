"""Building blocks of all pictures: style, boxes, lanes, texts under the pointer."""

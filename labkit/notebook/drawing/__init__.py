"""What all pictures are drawn with: style, boxes, lanes, texts under the pointer."""

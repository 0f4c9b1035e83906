"""What a reader of a notebook touches: magics, pictures, errors that are the lesson."""

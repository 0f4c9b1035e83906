"""The part of labkit that a reader of a notebook uses: magics, pictures, and errors shown as lessons."""

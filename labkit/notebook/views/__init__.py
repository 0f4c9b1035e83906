"""Views that change while a reader looks at them."""

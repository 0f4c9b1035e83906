"""The process groups of a rank: forming, watching, aborting and renewing them."""

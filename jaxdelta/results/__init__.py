"""Results folders, and the loop over documents that fills them."""

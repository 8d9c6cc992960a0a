"""The pool of KV pages that all engines of a run share; it belongs to none of them."""

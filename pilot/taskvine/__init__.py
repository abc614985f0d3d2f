"""A pilot that has a whole TaskVine pool behind it, for sites that run TaskVine (`engine = "taskvine"`)."""

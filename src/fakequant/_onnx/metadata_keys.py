"""Keys of the metadata that exported files have."""

# Of the file: its target, the arguments of the model that its inputs are, as JSON, and fingerprints of its graph and of
# the parameters it was made of.
TARGET, INPUTS = "fakequant.target", "fakequant.inputs"
GRAPH, PARAMETERS = "fakequant.graph", "fakequant.parameters"
# Of a node that makes codes: the quantizers they are of, a line each, and the number that was added to them.
QUANTIZER, OFFSET = "fakequant.quantizer", "fakequant.offset"

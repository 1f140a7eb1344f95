"""Keys of the metadata in exported files."""

# Of the file: its target; the names of the model's arguments for its inputs, as JSON; hashes of its graph and of the
# exported parameters.
TARGET, INPUTS = "fakequant.target", "fakequant.inputs"
GRAPH, PARAMETERS = "fakequant.graph", "fakequant.parameters"
# Of a node that outputs codes: the paths of their quantizers, one per line, and the offset that was added to them.
QUANTIZER, OFFSET = "fakequant.quantizer", "fakequant.offset"

"""Keys of the metadata in exported files."""

# Of the file: its target; the names of the model's arguments for its inputs, and those of the model's results for its
# outputs, as JSON; the names of its tensors, as JSON; hashes of its graph and of the parameters.
TARGET, INPUTS, OUTPUTS = "fakequant.target", "fakequant.inputs", "fakequant.outputs"
TENSORS = "fakequant.tensors"
GRAPH, PARAMETERS = "fakequant.graph", "fakequant.parameters"
# Of a node that outputs codes: the calls of quantizers that they are the result of, one name per line (see
# `call_names`), and the offset that was added to them.
QUANTIZER, OFFSET = "fakequant.quantizer", "fakequant.offset"

"""OpenVINO's CPU plug-in on x86."""

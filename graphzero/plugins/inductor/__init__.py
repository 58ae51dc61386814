"""The executor "inductor": compute between collectives is compiled by torch's Inductor."""

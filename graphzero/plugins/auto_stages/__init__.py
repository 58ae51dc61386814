"""``config.set_stage("auto")``: stages of a pipeline that are chosen once the step is known."""

"""Running a built kernel on a GPU: memory, launches, CUDA graphs, hang reports. Needs the ``gpu`` extra."""

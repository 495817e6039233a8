"""What has to hold on GPUs. `make gpu-check` runs it there and keeps a record; reduced forms run on CPUs."""

"""What `recompute: auto` chooses, layer by layer, and the check of that choice by the first step."""

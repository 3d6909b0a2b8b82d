"""What runs leave: folders of finished parts, and the road over documents."""

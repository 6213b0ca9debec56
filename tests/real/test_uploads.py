# SPDX-License-Identifier: Apache-2.0
"""What a driver answers arrives at oned, each time."""

from __future__ import annotations

from real.conftest import RealCloud

MANY = 40


def test_many_uploads_one_after_the_other(cloud: RealCloud) -> None:
    for number in range(MANY):
        image = cloud.data_image(f"many-{number}", b"x", persistent=bool(number % 2))
        assert cloud.oned.image(image).source
        cloud.oned.image_delete(image)

"""The operations of augmentation in NumPy, written for clarity: one image, and where simpler one pixel, at a time."""

import numpy as np


def crop_and_flip(image, pixels, offset_y, offset_x, mirror_y, mirror_x, mode="constant", fill=0):
    height, width = image.shape[:2]
    modes = {"constant": "constant", "nearest": "edge", "reflect": "symmetric", "wrap": "wrap"}
    options = {"constant_values": fill} if mode == "constant" else {}
    padded = np.pad(image, [(pixels, pixels), (pixels, pixels), (0, 0)], modes[mode], **options)
    top, left = pixels + int(offset_y), pixels + int(offset_x)
    cropped = padded[top : top + height, left : left + width]
    cropped = cropped[::-1] if mirror_y else cropped
    return cropped[:, ::-1] if mirror_x else cropped


def source_place(x, y, moves, height, width):
    """Returns the place of the input that pixel (x, y) of the output shows, by undoing each change in turn."""
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    at = np.array([x - centre_x - moves["shift_x"] * width, y - centre_y - moves["shift_y"] * height])
    cos, sin = np.cos(moves["radians"]), np.sin(moves["radians"])
    rotation = np.array([[cos, -sin], [sin, cos]])
    shear = np.array([[1, moves["shear_x"]], [moves["shear_y"], 1]])
    at = np.linalg.inv(rotation @ shear * moves["size"]) @ at
    at *= [-1 if moves["mirror_x"] else 1, -1 if moves["mirror_y"] else 1]
    return at[0] + centre_x + moves["offset_x"], at[1] + centre_y + moves["offset_y"]


def project(image, moves, mode="constant", fill=0.0, nearest=False):
    """Returns float64 values; the caller rounds."""
    height, width, _ = image.shape
    result = np.zeros(image.shape)

    def read(row, column):
        inside = 0 <= row < height and 0 <= column < width
        return image[row, column].astype(np.float64) if inside else np.full(image.shape[2], float(fill))

    for row in range(height):
        for column in range(width):
            x, y = source_place(column, row, moves, height, width)
            if mode == "nearest":
                x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
            if nearest:
                result[row, column] = read(int(np.floor(y + 0.5)), int(np.floor(x + 0.5)))
                continue
            left, top = int(np.floor(x)), int(np.floor(y))
            right_share, bottom_share = x - left, y - top
            above = read(top, left) * (1 - right_share) + read(top, left + 1) * right_share
            below = read(top + 1, left) * (1 - right_share) + read(top + 1, left + 1) * right_share
            result[row, column] = above * (1 - bottom_share) + below * bottom_share
    return result


def change_colours(image, brightness, contrast, saturation, hue, white):
    """Changes the colours in four steps in the YIQ space, where a fused matrix needs one."""
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    image = image.astype(np.float64) + brightness * white
    mean = (image @ to_yiq[0]).mean()
    image = (image - mean) * (1 + contrast) + mean
    y, i, q = np.moveaxis(image @ to_yiq.T, -1, 0)
    i, q = i * (1 + saturation), q * (1 + saturation)
    i, q = i * np.cos(hue) - q * np.sin(hue), i * np.sin(hue) + q * np.cos(hue)
    return np.clip(np.stack([y, i, q], -1) @ np.linalg.inv(to_yiq).T, 0, white)


def equalize(channel):
    values, counts = np.unique(channel, return_counts=True)
    if len(values) == 1:
        return channel
    up_to = np.cumsum(counts)
    new = np.floor(255 * (up_to - up_to[0]) / (up_to[-1] - up_to[0]) + 0.5)
    return new[np.searchsorted(values, channel)].astype(np.uint8)


def autocontrast(channel):
    low, high = int(channel.min()), int(channel.max())
    return channel if low == high else np.floor((channel - float(low)) * 255 / (high - low) + 0.5).astype(np.uint8)


def sharpen(image, factor):
    height, width, _ = image.shape
    result = image.astype(np.float64)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    for row in range(1, height - 1):
        for column in range(1, width - 1):
            around = image[row - 1 : row + 2, column - 1 : column + 2].astype(np.float64)
            smooth = (around * kernel[:, :, None]).sum((0, 1))
            result[row, column] += factor * (image[row, column] - smooth)
    return np.clip(result, 0, 255)

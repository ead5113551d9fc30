"""Differentiable simulations: 2-D turbulence under `lax.scan`, and bodies that attract each other.

Shapes: `B` members of an ensemble, `G` grid points along one side, `N` bodies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.validation.shapes import Array, Case, floats


def vorticity_tendency(
    w_hat: Array, forcing_hat: Array, viscosity: Array, wavenumbers: tuple[np.ndarray, np.ndarray]
) -> Array:
    """The time derivative of the vorticity in Fourier space, `complex[B, G, G / 2 + 1]`.

    Args:
        w_hat: the vorticity, transformed by `jnp.fft.rfft2`.
        forcing_hat: what drives the flow, likewise.
        viscosity: a scalar.
        wavenumbers: along both axes, each broadcasting to `[G, G / 2 + 1]`.
    """
    kx, ky = wavenumbers
    k2 = kx**2 + ky**2
    stream_hat = w_hat / np.where(k2 == 0, 1.0, k2).astype(np.float32)
    u = jnp.fft.irfft2(1j * ky * stream_hat)
    v = jnp.fft.irfft2(-1j * kx * stream_hat)
    w_x = jnp.fft.irfft2(1j * kx * w_hat)
    w_y = jnp.fft.irfft2(1j * ky * w_hat)
    advection_hat = jnp.fft.rfft2(u * w_x + v * w_y)
    cutoff = np.max(np.abs(kx)) * 2 / 3
    keep = (np.abs(kx) < cutoff) & (np.abs(ky) < cutoff)
    return jnp.where(keep, -advection_hat, 0.0) - viscosity * k2 * w_hat + forcing_hat


def simulate(params: dict[str, Array], steps: int, dt: float) -> Array:
    """The vorticity `[B, G, G]` after `steps` steps of Heun's method from `params["vorticity"]`."""
    grid = params["vorticity"].shape[-1]
    kx = np.fft.fftfreq(grid, 1 / grid).astype(np.float32)[:, None]
    ky = np.fft.rfftfreq(grid, 1 / grid).astype(np.float32)[None, :]
    forcing_hat = jnp.fft.rfft2(params["forcing"])
    viscosity = jnp.exp(params["log_viscosity"] - 6.0)

    def step(w_hat: Array, _: None) -> tuple[Array, None]:
        slope1 = vorticity_tendency(w_hat, forcing_hat, viscosity, (kx, ky))
        guess = w_hat + dt * slope1
        slope2 = vorticity_tendency(guess, forcing_hat, viscosity, (kx, ky))
        return w_hat + 0.5 * dt * (slope1 + slope2), None

    w_hat, _ = jax.lax.scan(step, jnp.fft.rfft2(params["vorticity"]), None, length=steps)
    return jnp.fft.irfft2(w_hat)


def navier_stokes(small: bool = False) -> Case:
    """128 pseudo-spectral steps on 256 x 256 points, 4 members, float32 and complex64.

    The initial vorticity, the forcing and the viscosity are fitted to an observed final state.

    Returns:
        `(loss, (params, observed))`.
    """
    members, grid, steps = (2, 16, 4) if small else (4, 256, 128)

    def loss(params: dict[str, Array], observed: Array) -> Array:
        return jnp.mean((simulate(params, steps, dt=0.005) - observed) ** 2)

    params = {
        "vorticity": floats(members, grid, grid),
        "forcing": floats(grid, grid),
        "log_viscosity": floats(),
    }
    return loss, (params, floats(members, grid, grid))


def accelerations(position: Array, mass: Array, softening: float) -> Array:
    """The acceleration `[N, 3]` of every body by the gravity of all others."""
    offset = position[None, :, :] - position[:, None, :]
    distance2 = jnp.sum(offset**2, axis=-1) + softening**2
    inverse_cube = distance2**-1.5
    return jnp.sum(offset * (mass[None, :] * inverse_cube)[..., None], axis=1)


def n_body(small: bool = False) -> Case:
    """40 unrolled leapfrog steps of 1024 bodies, float32.

    The initial positions, velocities and masses are fitted to observed final positions.

    Returns:
        `(loss, (params, observed))`.
    """
    bodies, steps = (8, 3) if small else (1024, 40)
    dt, softening = 0.01, 0.1

    def loss(params: Any, observed: Array) -> Array:
        position, velocity = params["position"], params["velocity"]
        mass = jnp.exp(params["log_mass"]) / bodies
        acceleration = accelerations(position, mass, softening)
        for _ in range(steps):
            velocity = velocity + 0.5 * dt * acceleration
            position = position + dt * velocity
            acceleration = accelerations(position, mass, softening)
            velocity = velocity + 0.5 * dt * acceleration
        centre = jnp.sum(mass[:, None] * velocity, axis=0) / jnp.sum(mass)
        return jnp.mean((position - observed) ** 2) + 0.1 * jnp.sum(centre**2)

    params = {
        "position": floats(bodies, 3),
        "velocity": floats(bodies, 3),
        "log_mass": floats(bodies),
    }
    return loss, (params, floats(bodies, 3))

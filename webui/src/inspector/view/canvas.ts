/** Canvases that are as sharp as the screen. */

/** Sets its size in CSS pixels and returns a context that draws in them. */
export function sharpen(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const scale = Math.min(devicePixelRatio || 1, 2); // beyond two nothing is seen, and each pixel costs
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

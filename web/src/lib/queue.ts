// One queue for all drawing: a few milliseconds of it a frame, so that the page answers while forty charts repaint.

const BUDGET = 8;
let jobs = new Map<object, () => void>();
let asked = false;

/** Paint soon; a later paint of the same owner replaces one that still waits. */
export function paint(owner: object, job: () => void): void {
  jobs.set(owner, job);
  if (!asked) { asked = true; requestAnimationFrame(work); }
}

function work() {
  const end = performance.now() + BUDGET;
  for (const [owner, job] of jobs) {
    jobs.delete(owner);
    job();
    if (performance.now() > end) break;
  }
  asked = jobs.size > 0;
  if (asked) requestAnimationFrame(work);
}

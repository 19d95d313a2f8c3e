/** An answer that says why something failed. */
export class Refused extends Error {
  constructor(message: string, readonly code: number) { super(message); }
}

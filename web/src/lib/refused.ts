/** An error response, with the server's message and status code. */
export class Refused extends Error {
  constructor(message: string, readonly code: number) { super(message); }
}

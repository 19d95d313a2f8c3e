// A real provider on a free port of this machine. Whoever gives a name at its login form is that user; the groups of `ann`
// and the address it sends people back to come from the command line. It insists on PKCE.
import http from 'node:http';
import Provider from 'oidc-provider';

const [redirect, secret] = process.argv.slice(2);
const server = http.createServer();
server.listen(0, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{ client_id: 'fanfold', client_secret: secret, redirect_uris: [redirect] }],
    scopes: ['openid', 'email', 'groups'],
    claims: { openid: ['sub'], email: ['email', 'email_verified'], groups: ['groups'] },
    cookies: { keys: ['a key of the tests'] },
    pkce: { required: () => true },
    findAccount: (_, id) => ({
      accountId: id,
      claims: () => ({ sub: id, email: `${id}@example.org`, email_verified: id !== 'eve', groups: id === 'ann' ? ['research', 'chess'] : [] }),
    }),
  });
  server.on('request', provider.callback());
  console.log(issuer);
});

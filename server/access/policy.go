package access

import (
	"cmp"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// Policy is the part of a listener's configuration that decides who may use it.
// It is safe for concurrent use.
type Policy struct {
	listener config.Listener
	tls      keys // nil without TLS
	rules    []rule
	review   *reviewer // nil without a rule of service accounts
}

// rule is one item of allow.
type rule struct {
	config.Allow
	cidr   netip.Prefix
	tokens *watched[[][sha256.Size]byte] // nil without token_file
	users  *watched[*passwords]          // nil without password_file
}

// New reads the files of a listener's block, or waits for its Workload API. An
// error is a *[conf.FieldError] whose field is within the block. The policy has
// to be closed, unless a [Gate] has it.
func New(l config.Listener) (_ *Policy, err error) {
	p := &Policy{listener: l}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	if l.TLS.Enabled() {
		if p.tls, err = newKeys(l.TLS); err != nil {
			return nil, err
		}
	}
	tokens, users := make(map[string]*watched[[][sha256.Size]byte]), make(map[string]*watched[*passwords]) // by file
	for i, a := range l.Allow {
		r := rule{Allow: a, tokens: tokens[a.Peer.TokenFile], users: users[a.Peer.PasswordFile]}
		bad := func(field string, err error) error {
			return &conf.FieldError{Field: fmt.Sprintf("allow[%d].peer.%s", i, field), Reason: err.Error()}
		}
		if a.Peer.CIDR != "" {
			r.cidr, _ = config.ParseCIDR(a.Peer.CIDR) // validated
		}
		if a.Peer.TokenFile != "" && r.tokens == nil {
			if r.tokens, err = watch([]string{a.Peer.TokenFile}, readTokens); err != nil {
				return nil, bad("token_file", err)
			}
			tokens[a.Peer.TokenFile] = r.tokens
		}
		if a.Peer.PasswordFile != "" && r.users == nil {
			if r.users, err = watch([]string{a.Peer.PasswordFile}, readPasswords); err != nil {
				return nil, bad("password_file", err)
			}
			users[a.Peer.PasswordFile] = r.users
		}
		if a.Peer.ServiceAccount != "" && p.review == nil {
			if p.review, err = newReviewer(l.TokenReview); err != nil {
				return nil, err
			}
		}
		p.rules = append(p.rules, r)
	}
	return p, nil
}

// Close ends what renews the certificate.
func (p *Policy) Close() {
	if p.tls != nil {
		p.tls.close()
	}
	if p.review != nil {
		p.review.close()
	}
}

// Caller is what is known of the one who calls.
type Caller struct {
	Address  netip.Addr           // invalid on a unix socket
	TLS      *tls.ConnectionState // nil for plaintext
	Token    string               // a bearer token
	User     string               // of basic authentication
	Password string

	account string                            // of the token, NAMESPACE/NAME; "" before a review
	logins  map[*watched[*passwords]]struct{} // the files that have the user with this password
	until   time.Time                         // end of the certificate, if it was verified again
}

// Role is what a caller may do at the admin address.
type Role int

// The roles. Each includes the ones before.
const (
	None Role = iota
	Read
	Operate
)

// admission is what a caller is let in with.
type admission struct {
	role       Role
	views      []config.View // restrictions, all of them together
	identity   string        // that was verified, "" for none
	until      time.Time     // when the certificate ends, zero without one
	credential bool          // whether a certificate, token or password was asked for
}

// String returns the role as the configuration has it.
func (r Role) String() string {
	switch r {
	case Read:
		return config.RoleRead
	case Operate:
		return config.RoleOperate
	}
	return "none"
}

// Check returns the role of a caller, [None] if no rule fits. Without rules
// everyone may read; the permissions of a Unix socket are a rule.
func (p *Policy) Check(c Caller) Role {
	a, _ := p.check(c)
	return a.role
}

// check returns what a caller gets by the rule with the best role.
func (p *Policy) check(c Caller) (a admission, ok bool) {
	if c, ok = p.verify(c); !ok {
		return admission{}, false
	}
	if len(p.rules) == 0 {
		if _, socket := p.listener.Socket(); socket {
			return p.admission(&c, nil, Operate), true
		}
		return p.admission(&c, nil, Read), true
	}
	for i := range p.rules {
		if r := &p.rules[i]; r.role() > a.role && r.fits(&c) {
			a = p.admission(&c, r, r.role())
		}
	}
	return a, a.role != None
}

// admit returns what a caller that opens a stream gets by the first rule that
// fits: the view of the listener and that of the rule.
func (p *Policy) admit(c Caller) (a admission, ok bool) {
	if c, ok = p.verify(c); !ok {
		return admission{}, false
	}
	if len(p.rules) == 0 {
		return p.admission(&c, nil, Read), true
	}
	// Each rule is asked once: its files may change.
	for i := range p.rules {
		if r := &p.rules[i]; r.fits(&c) {
			return p.admission(&c, r, Read), true
		}
	}
	return admission{}, false
}

// admission returns what a rule gives; nil is a listener without rules.
func (p *Policy) admission(c *Caller, r *rule, role Role) admission {
	a := admission{role: role, identity: c.identity(r), until: c.until, credential: c.verified()}
	if !p.listener.View.IsZero() {
		a.views = append(a.views, p.listener.View)
	}
	if r != nil {
		a.credential = a.credential || r.wantsSecret()
		if !r.View.IsZero() {
			a.views = append(a.views, r.View)
		}
	}
	return a
}

// verify returns the caller with its certificate verified as a handshake would
// now: authorities, lists of what is revoked, and the time may be others than
// when it connected.
func (p *Policy) verify(c Caller) (Caller, bool) {
	if p.tls == nil {
		return c, true
	}
	if c.TLS == nil {
		return c, false // connected before TLS was configured
	}
	if !p.listener.TLS.Verifies() {
		return c, true
	}
	if len(c.TLS.PeerCertificates) == 0 {
		return c, p.listener.TLS.ClientAuth != config.ClientAuthRequire
	}
	chains, until, err := verifyClient(p.tls.get(), c.TLS.PeerCertificates)
	if err != nil {
		return c, false
	}
	state := *c.TLS
	state.VerifiedChains = chains
	c.TLS, c.until = &state, until
	return c, true
}

// generation returns a number that changes with the credentials that the policy
// accepts.
func (p *Policy) generation() (sum int) {
	if p.tls != nil {
		sum += p.tls.generation()
	}
	for i := range p.rules {
		if t := p.rules[i].tokens; t != nil {
			sum += t.generation()
		}
	}
	return sum
}

func (r *rule) role() Role {
	if r.Role == config.RoleRead {
		return Read
	}
	return Operate
}

// fits reports whether a caller meets all conditions of the rule.
func (r *rule) fits(c *Caller) bool {
	if _, ok := c.logins[r.users]; r.users != nil && !ok {
		return false
	}
	return r.fitsAccount(c) && r.fitsBut(c)
}

// fitsBut is fits without the service account and the password.
func (r *rule) fitsBut(c *Caller) bool {
	p := &r.Peer
	switch {
	case p.CIDR != "" && !r.cidr.Contains(c.Address.Unmap().WithZone("")),
		p.SNI != "" && (c.TLS == nil || !match(p.SNI, c.TLS.ServerName)),
		p.SPIFFE != "" && !match(p.SPIFFE, c.spiffe()),
		p.SAN != "" && !c.named(p.SAN),
		r.tokens != nil && !hasToken(r.tokens.get(), c.Token):
		return false
	}
	return true
}

// wantsSecret reports whether the rule asks for a token, password or
// certificate.
func (r *rule) wantsSecret() bool {
	w := &r.Peer
	return cmp.Or(w.TokenFile, w.PasswordFile, w.ServiceAccount, w.SPIFFE, w.SAN) != ""
}

// match reports whether a name fits a pattern; "" fits none.
func match(pattern, name string) bool {
	ok, _ := path.Match(pattern, name) // validated
	return ok && name != ""
}

// verified reports whether the caller has a certificate that was verified.
func (c *Caller) verified() bool { return c.TLS != nil && len(c.TLS.VerifiedChains) > 0 }

// spiffe returns the SPIFFE ID of a verified certificate. One with several URIs
// has none; see the X.509-SVID specification, section 2.
func (c *Caller) spiffe() string {
	if !c.verified() || len(c.TLS.PeerCertificates[0].URIs) != 1 {
		return ""
	}
	id, err := spiffeid.FromURI(c.TLS.PeerCertificates[0].URIs[0])
	if err != nil {
		return ""
	}
	return id.String()
}

// named reports whether a name of a verified certificate fits a pattern: a URI
// if the pattern is one, else a DNS name or an address. Others, such as those
// of e-mail, may look the same, and say who reads it and not who answers there.
func (c *Caller) named(pattern string) bool {
	if !c.verified() {
		return false
	}
	leaf := c.TLS.PeerCertificates[0]
	if strings.Contains(pattern, "://") {
		return slices.ContainsFunc(leaf.URIs, func(u *url.URL) bool { return match(pattern, u.String()) })
	}
	return slices.ContainsFunc(leaf.DNSNames, func(name string) bool { return net.ParseIP(name) == nil && match(pattern, name) }) ||
		slices.ContainsFunc(leaf.IPAddresses, func(ip net.IP) bool { return match(pattern, ip.String()) })
}

// names returns the names of a verified certificate, for people.
func (c *Caller) names() (names []string) {
	if !c.verified() {
		return nil
	}
	leaf := c.TLS.PeerCertificates[0]
	names = append(names, leaf.DNSNames...)
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	for _, u := range leaf.URIs {
		names = append(names, u.String())
	}
	for _, e := range leaf.EmailAddresses {
		names = append(names, "mailto:"+e)
	}
	return names
}

// maxIdentity bounds an identity in logs and pages, in bytes.
const maxIdentity = 300

// identity returns who the caller is, as was verified, "" for nobody: by its
// certificate, and by what the rule that let it in asked for. A token is told
// by the beginning of its SHA-256.
func (c *Caller) identity(r *rule) string {
	var is []string
	if id := c.spiffe(); id != "" {
		is = append(is, id)
	} else if names := c.names(); len(names) > 0 {
		is = append(is, "certificate "+strings.Join(names, " "))
	}
	if r != nil && r.users != nil {
		is = append(is, "user "+c.User)
	}
	if r != nil && r.Peer.ServiceAccount != "" {
		is = append(is, "service account "+c.account)
	}
	if r != nil && r.tokens != nil {
		sum := sha256.Sum256([]byte(c.Token))
		is = append(is, "token "+hex.EncodeToString(sum[:4]))
	}
	return clip.Text(strings.Join(is, ", "), maxIdentity)
}

// String describes the caller without its secrets.
func (c *Caller) String() string {
	var is []string
	if c.Address.IsValid() {
		is = append(is, "address "+c.Address.String())
	} else {
		is = append(is, "a unix socket")
	}
	switch {
	case c.TLS == nil:
		is = append(is, "no TLS")
	case c.verified():
		is = append(is, "certificate for "+strings.Join(c.names(), " "))
	default:
		is = append(is, "no client certificate")
	}
	if c.TLS != nil && c.TLS.ServerName != "" {
		is = append(is, "server name "+c.TLS.ServerName)
	}
	switch {
	case c.account != "":
		is = append(is, "a token of service account "+c.account)
	case c.Token != "":
		is = append(is, "a token")
	default:
		is = append(is, "no token")
	}
	if c.User != "" {
		is = append(is, "user "+c.User)
	}
	return strings.Join(is, ", ")
}

// readTokens reads a file of bearer tokens, one per line.
func readTokens(files []string) (tokens [][sha256.Size]byte, err error) {
	text, err := readFile(files[0])
	if errors.Is(err, fs.ErrNotExist) {
		return nil, gone{err}
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			tokens = append(tokens, sha256.Sum256([]byte(line)))
		}
	}
	if len(tokens) == 0 {
		return nil, gone{fmt.Errorf("%s holds no token; write one on a line of its own", files[0])}
	}
	return tokens, nil
}

// hasToken compares in constant time.
func hasToken(tokens [][sha256.Size]byte, token string) bool {
	sum, found := sha256.Sum256([]byte(token)), 0
	for _, t := range tokens {
		found |= subtle.ConstantTimeCompare(sum[:], t[:])
	}
	return token != "" && found == 1
}

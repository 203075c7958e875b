package access

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"fmt"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"golang.org/x/crypto/bcrypt"

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
	for i, a := range l.Allow {
		r := rule{Allow: a}
		bad := func(field string, err error) error {
			return &conf.FieldError{Field: fmt.Sprintf("allow[%d].peer.%s", i, field), Reason: err.Error()}
		}
		if a.Peer.CIDR != "" {
			r.cidr, _ = config.ParseCIDR(a.Peer.CIDR) // validated
		}
		if a.Peer.TokenFile != "" {
			if r.tokens, err = watch([]string{a.Peer.TokenFile}, readTokens); err != nil {
				return nil, bad("token_file", err)
			}
		}
		if a.Peer.PasswordFile != "" {
			if r.users, err = watch([]string{a.Peer.PasswordFile}, readPasswords); err != nil {
				return nil, bad("password_file", err)
			}
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

	account string // of the token, NAMESPACE/NAME; "" before a review
}

// Role is what a caller may do at the admin address.
type Role int

// The roles. Each includes the ones before.
const (
	None Role = iota
	Read
	Operate
)

// Check returns the role of a caller, [None] if no rule fits. Without rules
// everyone has all roles.
func (p *Policy) Check(c Caller) Role {
	if p.tls != nil && c.TLS == nil {
		return None // connected before TLS was configured
	}
	if len(p.rules) == 0 {
		return Operate
	}
	role := None
	for i := range p.rules {
		if r := &p.rules[i]; r.role() > role && r.fits(&c) {
			role = r.role()
		}
	}
	return role
}

// Admit reports whether a caller may open streams, and returns the views that
// they are restricted to, all of them together: that of the listener, and that
// of the first rule that fits.
func (p *Policy) Admit(c Caller) (views []config.View, ok bool) {
	if p.tls != nil && c.TLS == nil {
		return nil, false // connected before TLS was configured
	}
	if !p.listener.View.IsZero() {
		views = append(views, p.listener.View)
	}
	if len(p.rules) == 0 {
		return views, true
	}
	// Each rule is asked once: its files may change.
	for i := range p.rules {
		if r := &p.rules[i]; r.fits(&c) {
			if !r.View.IsZero() {
				views = append(views, r.View)
			}
			return views, true
		}
	}
	return nil, false
}

func (r *rule) role() Role {
	if r.Role == config.RoleRead {
		return Read
	}
	return Operate
}

// fits reports whether a caller meets all conditions of the rule.
func (r *rule) fits(c *Caller) bool { return r.fitsAccount(c) && r.fitsBut(c) }

// fitsBut is fits without the service account.
func (r *rule) fitsBut(c *Caller) bool {
	p := &r.Peer
	switch {
	case p.CIDR != "" && !r.cidr.Contains(c.Address.Unmap().WithZone("")),
		p.SNI != "" && (c.TLS == nil || !match(p.SNI, c.TLS.ServerName)),
		p.SPIFFE != "" && !match(p.SPIFFE, c.spiffe()),
		p.SAN != "" && !slices.ContainsFunc(c.names(), func(name string) bool { return match(p.SAN, name) }),
		r.tokens != nil && !hasToken(r.tokens.get(), c.Token),
		r.users != nil && !r.users.get().has(c.User, c.Password):
		return false
	}
	return true
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

// names returns the DNS names, addresses and URIs of a verified certificate.
func (c *Caller) names() (names []string) {
	if !c.verified() {
		return nil
	}
	leaf := c.TLS.PeerCertificates[0]
	names = append(names, leaf.DNSNames...)
	names = append(names, leaf.EmailAddresses...)
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	for _, u := range leaf.URIs {
		names = append(names, u.String())
	}
	return names
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
	text, err := os.ReadFile(files[0])
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			tokens = append(tokens, sha256.Sum256([]byte(line)))
		}
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("%s holds no token; write one on a line of its own", files[0])
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

// passwords are the users of a file of htpasswd, with bcrypt hashes.
type passwords struct {
	hashes map[string][]byte
	slots  chan struct{} // bounds how many hashes are computed at a time
	known  sync.Map      // digests of pairs that were right
}

func readPasswords(files []string) (*passwords, error) {
	text, err := os.ReadFile(files[0])
	if err != nil {
		return nil, err
	}
	p := &passwords{hashes: make(map[string][]byte), slots: make(chan struct{}, 2)}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		user, hash, _ := strings.Cut(line, ":")
		if _, err := bcrypt.Cost([]byte(hash)); err != nil || user == "" {
			return nil, fmt.Errorf("%s, line %d: must be USER:HASH with a bcrypt hash, as htpasswd -B writes it", files[0], n)
		}
		p.hashes[user] = []byte(hash)
	}
	if len(p.hashes) == 0 {
		return nil, fmt.Errorf("%s holds no user; htpasswd -B -c writes one", files[0])
	}
	return p, nil
}

// has reports whether a user has this password. A hash takes tens of
// milliseconds, so that a password that was right is remembered, as a digest,
// for as long as the file does not change.
func (p *passwords) has(user, password string) bool {
	hash, ok := p.hashes[user]
	if !ok {
		return false
	}
	sum := sha256.Sum256([]byte(user + ":" + password))
	if _, right := p.known.Load(sum); right {
		return true
	}
	p.slots <- struct{}{}
	defer func() { <-p.slots }()
	if bcrypt.CompareHashAndPassword(hash, []byte(password)) != nil {
		return false
	}
	p.known.Store(sum, nil) // at most one for each user: the hash fits one password
	return true
}

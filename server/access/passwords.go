package access

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/bcrypt"
)

const (
	// loginTime bounds the wait for a turn.
	loginTime = 10 * time.Second
	// loginsWaiting bounds how many of one address wait.
	loginsWaiting = 8
	// guessRest is how long an address rests after a wrong password, times
	// those of the last minutes, up to mostRest.
	guessRest, mostRest = time.Second, 30 * time.Second
	// guessesForgotten is when wrong passwords of an address are forgotten.
	guessesForgotten = 5 * time.Minute
)

// logins are the turns of passwords.
type logins struct {
	*Turns
	mu      sync.Mutex
	guesses map[netip.Prefix]guesses // guarded by mu
}

// guesses are wrong passwords of an address, or of a /64.
type guesses struct {
	n    int
	last time.Time
}

func newLogins() *logins {
	return &logins{Turns: NewTurns(1, 1, loginsWaiting), guesses: make(map[netip.Prefix]guesses)}
}

// wrong notes a wrong password, and returns how long the address rests. One who
// errs waits a second, and those who guess leave most of the time to others.
func (l *logins) wrong(from netip.Addr) time.Duration {
	key, now := Network(from), time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.guesses[key]
	if now.Sub(g.last) > guessesForgotten {
		g.n = 0
	}
	if len(l.guesses) >= maxSpared {
		clear(l.guesses)
	}
	l.guesses[key] = guesses{g.n + 1, now}
	return min(time.Duration(g.n+1)*guessRest, mostRest)
}

// errLogins is the error of a password that was not looked at.
var errLogins = errors.New("too many passwords are being checked")

// passwords are the users of a file of htpasswd, with bcrypt hashes.
type passwords struct {
	hashes map[string][]byte
	decoy  []byte   // a hash of the file, for names that it does not have
	known  sync.Map // digests of pairs that were right
}

func readPasswords(files []string) (*passwords, error) {
	p := &passwords{hashes: make(map[string][]byte)}
	text, err := readFile(files[0])
	if errors.Is(err, fs.ErrNotExist) {
		return p, gone{err}
	}
	if err != nil {
		return nil, err
	}
	n, most := 0, 0
	for line := range strings.Lines(string(text)) {
		n++
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		user, hash, _ := strings.Cut(line, ":")
		cost, err := bcrypt.Cost([]byte(hash))
		if err != nil || user == "" {
			return nil, fmt.Errorf("%s, line %d: must be USER:HASH with a bcrypt hash, as htpasswd -B writes it", files[0], n)
		}
		p.hashes[user] = []byte(hash)
		if cost > most {
			most, p.decoy = cost, []byte(hash)
		}
	}
	if len(p.hashes) == 0 {
		return p, gone{fmt.Errorf("%s holds no user; htpasswd -B -c writes one", files[0])}
	}
	return p, nil
}

// knows reports whether the password was right before. A hash takes tens of
// milliseconds, so that what was right is remembered, as a digest, for as long
// as the file does not change.
func (p *passwords) knows(user, password string) bool {
	_, right := p.known.Load(sha256.Sum256([]byte(user + ":" + password)))
	return right
}

// has compares a password with the hash of the user. It takes as long for names
// that the file does not have.
func (p *passwords) has(user, password string) bool {
	hash, ok := p.hashes[user]
	if !ok {
		hash = p.decoy
	}
	if bcrypt.CompareHashAndPassword(hash, []byte(password)) != nil || !ok {
		return false
	}
	p.known.Store(sha256.Sum256([]byte(user+":"+password)), nil) // at most one for each user: the hash fits one password
	return true
}

// login finds the files that have the caller's user with its password, of those
// of rules that the caller meets otherwise. Hashes are computed one at a time,
// those of each address in turn, and after a wrong password nothing for as long
// as its hash took, so that guesses take a quarter of two processors at most,
// and the address rests.
// The same number is computed whether there is a user of that name or not. An
// error is [errLogins].
func (p *Policy) login(ctx context.Context, l *logins, from netip.Addr, c *Caller) error {
	if c.User == "" && c.Password == "" {
		return nil
	}
	c.logins = make(map[*watched[*passwords]]struct{})
	type open struct {
		file *watched[*passwords]
		*passwords
	}
	var unknown, ask []open
	named := false
	for i := range p.rules {
		r := &p.rules[i]
		if _, done := c.logins[r.users]; r.users == nil || done || !r.fitsBut(c) {
			continue
		}
		o := open{r.users, r.users.get()}
		_, has := o.hashes[c.User]
		switch {
		case has && o.knows(c.User, c.Password):
			named = true
			c.logins[r.users] = struct{}{}
		case has:
			named = true
			ask = append(ask, o)
		case o.decoy != nil:
			unknown = append(unknown, o)
		}
	}
	if !named && len(unknown) > 0 {
		ask = unknown[:1]
	}
	if len(ask) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, loginTime)
	defer cancel()
	turn, err := l.Enter(ctx, Network(from).String())
	if err != nil {
		return errLogins
	}
	defer turn.Leave()
	began := time.Now()
	for _, o := range ask {
		if o.has(c.User, c.Password) {
			c.logins[o.file] = struct{}{}
		}
	}
	if len(c.logins) == 0 {
		turn.FreeAfter(time.Since(began))
		turn.RestAfter(l.wrong(from))
	}
	return nil
}

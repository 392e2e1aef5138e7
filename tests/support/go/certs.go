// certs writes what TLS needs into a folder: `certs DIR [IP...]` leaves ca.crt, and node.crt with node.key for
// 127.0.0.1 and the given addresses, as server and as client; expired.crt with expired.key, the same but
// in the past; other-ca.crt, of an authority that signed none of them; and self.crt with self.key, an authority
// that is its own server, as `openssl req -x509` makes it.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

func main() {
	dir := os.Args[1]
	ca := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "test authority"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	other := *ca
	other.SerialNumber = big.NewInt(4)
	other.Subject = pkix.Name{CommonName: "another authority"}
	node := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "node"},
		NotBefore:    ca.NotBefore,
		NotAfter:     ca.NotAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	for _, ip := range os.Args[2:] {
		node.IPAddresses = append(node.IPAddresses, net.ParseIP(ip))
	}
	expired := *node
	expired.SerialNumber = big.NewInt(3)
	expired.NotBefore = time.Now().Add(-48 * time.Hour)
	expired.NotAfter = time.Now().Add(-24 * time.Hour)
	caKey, otherKey := key(), key()
	write(dir, "ca.crt", "CERTIFICATE", sign(ca, ca, caKey, caKey))
	write(dir, "other-ca.crt", "CERTIFICATE", sign(&other, &other, otherKey, otherKey))
	pair(dir, "node", node, ca, caKey)
	pair(dir, "expired", &expired, ca, caKey)
	self := *node
	self.SerialNumber = big.NewInt(5)
	self.Subject = pkix.Name{CommonName: "self"}
	self.KeyUsage, self.ExtKeyUsage = 0, nil
	self.BasicConstraintsValid, self.IsCA = true, true
	selfKey := key()
	write(dir, "self.crt", "CERTIFICATE", sign(&self, &self, selfKey, selfKey))
	writeKey(dir, "self", selfKey)
}

func pair(dir, name string, cert, ca *x509.Certificate, by *ecdsa.PrivateKey) {
	own := key()
	write(dir, name+".crt", "CERTIFICATE", sign(cert, ca, own, by))
	writeKey(dir, name, own)
}

func writeKey(dir, name string, own *ecdsa.PrivateKey) {
	der, err := x509.MarshalPKCS8PrivateKey(own)
	check(err)
	write(dir, name+".key", "PRIVATE KEY", der)
}

func key() *ecdsa.PrivateKey {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
	return k
}

func sign(cert, parent *x509.Certificate, k, by *ecdsa.PrivateKey) []byte {
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &k.PublicKey, by)
	check(err)
	return der
}

func write(dir, name, kind string, der []byte) {
	text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	check(os.WriteFile(filepath.Join(dir, name), text, 0o600))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
